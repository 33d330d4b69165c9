"""The ending of a block with XA resources, or over several homes: the broker decides when every branch is prepared."""
