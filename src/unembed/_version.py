"""The version, in the one place that the build, the package and the reports read."""

__version__ = "0.1.0"
