"""The day that the example replays: its plan, the merchants' endpoints, the ledger, the judge and the report.

The shop itself does not need this package.
"""
