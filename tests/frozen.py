"""Imported last by the server of `tests/warm.py`: collections in forked processes leave what it imported alone.

Otherwise each collection of a forked process visits a million objects, and copies every page that they are on.
"""

import gc

gc.collect()
gc.freeze()
