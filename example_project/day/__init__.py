"""The day that the example replays: its plan, the merchants' endpoints, the ledger, the judge and the report.

Nothing in here is needed by the shop itself.
"""
