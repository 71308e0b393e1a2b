"""Storage in files of a local or shared folder: one file a page."""
