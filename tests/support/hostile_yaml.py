"""YAML documents that must be refused quickly, without much memory."""

from __future__ import annotations

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join(['*' + previous] * 10)}]"
    for previous, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: v}\n" + "\n".join(
    f"{name}: &{name} {{<<: [{', '.join(['*' + previous] * 10)}]}}"
    for previous, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE_YAML = {
    "aliases": LAUGHS,
    "merges": MERGES,
    "one alias": "a: &a [1]\nb: *a",
    "deep lists": f"a: {'[' * 900}{']' * 900}",
    "very deep lists": f"a: {'[' * 50_000}{']' * 50_000}",
    "deep mappings": "a: " + "{a: " * 500 + "1" + "}" * 500,
    "many values": f"a: [{'1, ' * 200_000}1]",
    "long integer": f"a: {'9' * 5000}",
    "large integer": f"a: {'9' * 30}",
    "infinity": "a: .inf",
    "impossible date": "a: 2020-13-45",
    "a key that is no string": "1: x",
    "no mapping": "- a",
    "syntax": "a: [",
    "code": "a: !!python/object/apply:os.system ['true']",
    "reserved name": "self: 1",
}
