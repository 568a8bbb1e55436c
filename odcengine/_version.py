"""The one place that states the version; ``setup.py`` and ``odcengine.__version__`` read it."""

__version__ = "0.1.0"
