"""The report of one or several runs as one HTML page that needs no network.

Python computes every number that the page shows; the scripts in browser/ only draw them.
"""
