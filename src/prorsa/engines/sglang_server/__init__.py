"""Real SGLang engines as processes of this machine.

`launcher` runs in our interpreter and `flags` says what it passes; all else runs in the engines' own one, which needs
SGLang and of Prorsa only this package: `keeper` starts the engines and ends with us, `plugin` mends what SGLang 0.5.23
does wrong when roles flip, and `cpu` with `cpu_standins` and `cpu_models` is what it takes where no GPU is.
"""
