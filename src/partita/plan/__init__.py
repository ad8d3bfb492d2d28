"""The plan: a layout's ledger, its laws, its peak, and how it is explained.  No torch."""
