"""The proxy before the ingress: HAProxy's configuration, and the proxy's own errors in the API's shape."""
