"""Programs of the checkout; `nbverify generate` runs one of them."""
