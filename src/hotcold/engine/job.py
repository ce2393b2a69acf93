"""The old address of jobs, for version 0.1 alone."""

from hotcold.engine.old_names import moved

__getattr__ = moved(__name__, Grammar="Grammar", Job="Job", JobError="RequestError")
