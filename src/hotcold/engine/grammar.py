"""The old address of Grammars, for version 0.1 alone."""

from hotcold.engine.old_names import moved

__getattr__ = moved(__name__, Grammars="Grammars", schema_grammar="schema_grammar")
