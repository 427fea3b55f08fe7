"""Replaces the source of one module with a broken version.

Python runs this file at startup if its folder is on the path. It works for every importer and with
every import hook.
"""

import os
from importlib.machinery import SourceFileLoader

if "JAXFORMER_BROKEN_FILE" in os.environ:
    _FILE, _SOURCE = (os.environ[f"JAXFORMER_BROKEN_{name}"] for name in ("FILE", "SOURCE"))
    _get_data, _path_stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def get_data(self, path):
        return _SOURCE.encode() if path == _FILE else _get_data(self, path)

    def path_stats(self, path):
        if path == _FILE:
            raise OSError("its bytecode is neither read nor written")
        return _path_stats(self, path)

    SourceFileLoader.get_data, SourceFileLoader.path_stats = get_data, path_stats
