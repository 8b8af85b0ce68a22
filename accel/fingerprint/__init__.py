"""When two blocks are the same code over weights of the same shapes."""
