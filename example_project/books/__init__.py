"""A ledger whose running balance proves the order of its postings."""
