"""Plots by Vega-Lite: one spec of each chart, which the page gives to Vega, and files to vl_convert."""
