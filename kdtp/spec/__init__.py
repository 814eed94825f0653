"""The method as pure functions: grow a tree, say what its rows see, choose one token per row, walk."""
