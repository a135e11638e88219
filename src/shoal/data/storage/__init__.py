"""Files behind an address: a local folder, memory, HTTP, S3, HDFS, or whatever ``fsspec`` reaches, behind one small interface."""
