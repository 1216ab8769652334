"""Memories, a folder each; importing this package registers the options of every type, without torch."""

import importlib
import importlib.util
import pkgutil

for _folder in pkgutil.iter_modules(__path__, f"{__name__}."):
    if _folder.ispkg and importlib.util.find_spec(f"{_folder.name}.options") is not None:
        importlib.import_module(f"{_folder.name}.options")
