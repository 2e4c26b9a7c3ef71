"""The dashboard in a real Chromium without a window, driven by Playwright.

``chromium``   finds and starts the browser, and collects the errors that its console reports
``busy_hour``  the queues that pages and pictures show
``__main__``   takes the pictures of the documentation: ``python -m tests.browser``
"""
