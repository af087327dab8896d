"""Runs and studies to look at: one plain document of findings, plots and tables, and the page, the text and the pictures made of it."""
