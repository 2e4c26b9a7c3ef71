"""Mutation tests: can the suite see that a promise is broken?

A promise that a second mechanism also keeps (the lease expires, the broker renames an id, kombu retries) can
be broken without a red test. `tests.mutations` therefore breaks the code on purpose, one place at a time, in
a copy, and runs the tests that must turn red.

``mutation``  what a mutation is, and when it does not fit the code
``table``     three for each promise
``mistakes``  others at random places, by a seed
``__main__``  the program: ``python -m tests.mutations``
"""
