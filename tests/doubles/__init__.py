"""A clock that jumps, which several folders of tests use."""
