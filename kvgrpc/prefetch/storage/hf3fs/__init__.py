"""Storage in one file of 3FS, DeepSeek's file system; it never met a cluster: only ``client="local"`` was ever run.

With ``local`` the file may lie in any folder. docs/storage.md says what was tried of ``usrbio``.
"""
