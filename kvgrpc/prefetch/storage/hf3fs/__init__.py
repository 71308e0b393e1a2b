"""Storage in one file of 3FS, DeepSeek's file system, or of any other that has the file's folder."""
