"""For tests of your own: does your training really come back exactly?

Example:
  >>> import jaxshard.testing
  >>> jaxshard.testing.assert_trees_bitwise_equal({"w": 1.0}, {"w": 1.0})
"""

from jaxshard.testing._exact import ExactResume, assert_exact_resume
from jaxshard.testing._trees import assert_trees_bitwise_equal

__all__ = ["ExactResume", "assert_exact_resume", "assert_trees_bitwise_equal"]
