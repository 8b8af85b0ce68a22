"""The programs that the engine works inside, one package or module each."""
