"""Kernel bodies of the tree step.  What each computes is defined by a numpy function one directory up."""
