"""Training of drafts: data from the target itself, DFlash and DSpark, evaluation, export.

Needs torch, numpy, safetensors, tokenizers and jinja2 only, so that it runs on a bare GPU machine.
"""
