package marshal.tests;

import java.io.IOException;
import java.net.URI;
import java.net.URISyntaxException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.ChecksumFs;
import org.apache.hadoop.fs.DelegateToFileSystem;
import org.apache.hadoop.fs.FsConstants;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/** Hadoop's local file system, but permissions are set in the JVM and not by a process `chmod` for each file. */
public class QuickLocalFileSystem extends LocalFileSystem {
    public QuickLocalFileSystem() {
        super(new Raw());
    }

    static class Raw extends RawLocalFileSystem {
        public void setPermission(Path path, FsPermission permission) throws IOException {
            String text = permission.getUserAction().SYMBOL + permission.getGroupAction().SYMBOL
                + permission.getOtherAction().SYMBOL;
            Files.setPosixFilePermissions(pathToFile(path).toPath(), PosixFilePermissions.fromString(text));
        }
    }

    /** The same for Hadoop's newer interface. */
    public static class Contexts extends ChecksumFs {
        public Contexts(URI uri, Configuration configuration) throws IOException, URISyntaxException {
            super(new RawContexts(configuration));
        }
    }

    static class RawContexts extends DelegateToFileSystem {
        RawContexts(Configuration configuration) throws IOException, URISyntaxException {
            super(FsConstants.LOCAL_FS_URI, new Raw(), configuration, "file", false);
        }

        public int getUriDefaultPort() {
            return -1;
        }

        public boolean isValidName(String path) {
            return true;
        }
    }
}
