"""Runs and studies to look at: one plain document of findings, plots and tables, and the page, the text and the pictures made of it.

May import explain/, predict/, study/, export/ and below. Its door is document.py: `report` makes the document. html.py, markdown.py,
terminal.py and vega/ draw it.
"""
