#!/bin/sh
# Installs the packages of the examples into a virtual environment of their own, and runs each against a server.
# Usage: examples/run_clients.sh URL MODEL, with a URL that ends in /v1
set -eu
here=$(cd "$(dirname "$0")" && pwd)
environment=${CLIENTS_VENV:-build/clients-venv}
python3 -m venv "$environment"
"$environment/bin/pip" install -q openai anthropic instructor 'pydantic-ai-slim[openai]' langchain-openai 'smolagents[openai]'
for example in openai_tools anthropic_tools instructor_weather pydantic_ai_weather langchain_tools smolagents_tools; do
    echo "$example:"
    "$environment/bin/python" "$here/$example.py" "$1" "$2" 'The weather in Rome?'
done
