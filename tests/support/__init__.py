"""What tests of several folders share: small towers, tasks, runs, lessons, servers, and a browser."""
