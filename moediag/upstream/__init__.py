"""What an upstream bug report needs: the environment, and a draft in the order of each template."""
