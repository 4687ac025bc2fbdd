"""The main job with no configuration: `sennit demo`. `gpt.py` is the model, `comparison.py` the job."""
