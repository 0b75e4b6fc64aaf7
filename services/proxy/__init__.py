"""What stands before the ingress: HAProxy's configuration, and errors in the API's shape from a proxy itself."""
