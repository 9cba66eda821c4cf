"""Former names of tests.support.tensor_sizes."""

from tests.support.tensor_sizes import LargestTensor as Largest
from tests.support.tensor_sizes import storage_size as kept_together

__all__ = ["Largest", "kept_together"]
