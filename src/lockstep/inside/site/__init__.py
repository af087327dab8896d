"""The folder that `lockstep attach` puts in front of PYTHONPATH. Python imports `sitecustomize` from it, and nobody anything else."""
