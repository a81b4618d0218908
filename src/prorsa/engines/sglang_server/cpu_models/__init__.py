"""The models that a CPU engine can run. SGLang looks here first and so need not import all that it has."""
