"""Report: one self-contained HTML page, which asks nobody for anything when it is opened."""
