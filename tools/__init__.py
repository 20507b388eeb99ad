"""Scripts on the public API: each runs from a checkout, as `python tools/NAME.py`."""
