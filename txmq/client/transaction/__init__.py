"""The transaction block and its endings, half messages, the X/Open resource."""
