"""The tree step around a verify: drafts to trees, trees to buffers, acceptance, compaction."""
