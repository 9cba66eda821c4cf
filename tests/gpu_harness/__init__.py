"""GPU kernels without a GPU: the kernels that Inductor generates for a GPU, run by Triton's interpreter on CPU tensors.

`fake_device` makes Inductor generate code for an H100 or A100 that is not there, `launcher` takes the generated kernels
out of its hands, and `backend` compiles flex_attention with both. `bfloat16` corrects bfloat16 in the interpreter,
`bounds` checks every access to memory, and `speed` makes it bearable. The package's own Triton kernels run the same
way (`interpreted/test_triton_bias.py`), and `launches` hands them to the assembler.

The tests in `interpreted/` need a process of their own, because all this changes torch for good. `make
test-gpu-kernels` runs them, and `test_sample.py` runs a few in a subprocess.

What this proves is that the kernels compute the right numbers. It says nothing about speed, about races between
programs (they run one after another), about TF32 (products are float32), or about what ptxas makes of them:
`make gpu-report` assembles the same kernels.
"""
