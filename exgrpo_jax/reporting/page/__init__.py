"""The report on one or more runs: a single HTML page that needs no network.

Python computes every number that the page shows; the scripts in browser/ only draw them.
"""
