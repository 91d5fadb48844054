"""Serving engines that call nbverify.  Each imports its engine where it is used, and nothing imports them."""
