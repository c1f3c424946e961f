"""From one device to a pod: where matrices lie on a mesh, and where they are computed."""
