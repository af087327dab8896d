"""Quantized layers: fake quantization in training, and conversion of a model to int8 layers (docs/quantization.md).

    scheme.py   how numbers become integers       fold.py     batch norm becomes part of a convolution's weights
    fake.py     layers that round in fp32         layers.py   layers that compute with integers
    calibrate.py   ranges from calibration images

May import recipe.py, torch_private.py and errors.py. training/ calls it. Its doors are training.py (`quantize=qat`: fake quantization in
every step, ranges that all ranks share, an int8 model after every epoch) and convert.py (from a trained model to one with int8 layers).
"""
