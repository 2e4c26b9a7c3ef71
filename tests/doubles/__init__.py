"""A clock that jumps and a limit of threads, which several folders of tests use."""
