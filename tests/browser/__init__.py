"""The dashboard in a real Chromium: a program, because the browser is too large to install for every run.

``chromium``  drives a browser without a window over a pipe
``__main__``  the checks and the pictures of the documentation: ``python -m tests.browser``
"""
