"""Runs and studies as pages in a browser, live while they go on. The one thing that can be changed there is to stop a run.

May import report/ and below, and reads run folders only. Its door is server.py: `Server`.
"""
