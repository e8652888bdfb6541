"""The report on one or more runs: a single HTML page that needs no network.

Python computes all numbers on the page; the scripts in browser/ only draw them.
"""
