"""Runs and studies as pages in a browser, live while they go on. Everything is read from run folders; the one thing that can be changed is to stop a run."""
