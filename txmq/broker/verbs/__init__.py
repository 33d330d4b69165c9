"""One file for each verb of the protocol, named as on the wire, and what several verbs share."""
